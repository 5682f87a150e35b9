cat a.txt
echo gold >> b.txt
