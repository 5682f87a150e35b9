ls
cat plum.txt
echo gold > new.txt
