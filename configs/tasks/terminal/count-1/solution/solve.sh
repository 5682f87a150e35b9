wc -l a.txt
echo 2 > new.txt
