cat a.txt
echo red >> b.txt
