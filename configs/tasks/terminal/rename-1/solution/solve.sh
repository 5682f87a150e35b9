ls
mv apple.txt new.txt
