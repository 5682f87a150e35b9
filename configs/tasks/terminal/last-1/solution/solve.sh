sort a.txt
echo red > new.txt
