touch empty.txt
