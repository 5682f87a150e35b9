cat a.txt
echo blue >> b.txt
