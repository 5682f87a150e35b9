grep -l gold *
rm pear.txt
