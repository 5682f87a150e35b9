grep -l gold *
rm plum.txt
