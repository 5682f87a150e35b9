cat a.txt
echo green >> b.txt
