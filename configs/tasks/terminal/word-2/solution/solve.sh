ls
cat pear.txt
echo green > out.txt
