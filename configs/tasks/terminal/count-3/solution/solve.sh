wc -l a.txt
echo 4 > new.txt
