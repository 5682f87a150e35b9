ls > files.txt
