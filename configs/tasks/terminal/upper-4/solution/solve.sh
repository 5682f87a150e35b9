cat a.txt
echo GOLD > out.txt
