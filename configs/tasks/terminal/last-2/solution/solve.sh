sort a.txt
echo green > out.txt
