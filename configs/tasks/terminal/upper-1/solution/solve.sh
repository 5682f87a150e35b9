cat a.txt
echo RED > new.txt
