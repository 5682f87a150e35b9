echo hello > out.txt
