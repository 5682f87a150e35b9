wc -l a.txt
echo 5 > out.txt
