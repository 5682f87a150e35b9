wc -l a.txt
echo 4 > out.txt
