cat a.txt
echo BLUE > out.txt
