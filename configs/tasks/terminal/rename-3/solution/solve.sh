ls
mv plum.txt new.txt
