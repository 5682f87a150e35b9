sort a.txt
echo red > out.txt
