wc -l a.txt
echo 3 > out.txt
