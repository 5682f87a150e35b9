ls
mv pear.txt out.txt
