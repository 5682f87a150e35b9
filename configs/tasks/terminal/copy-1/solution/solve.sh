ls
cp apple.txt new.txt
