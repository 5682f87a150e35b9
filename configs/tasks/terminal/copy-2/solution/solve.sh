ls
cp pear.txt out.txt
