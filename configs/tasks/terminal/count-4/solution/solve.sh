wc -l a.txt
echo 2 > out.txt
