grep -l gold *
rm apple.txt
