cat a.txt
echo GREEN > new.txt
