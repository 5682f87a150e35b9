ls
cp plum.txt new.txt
