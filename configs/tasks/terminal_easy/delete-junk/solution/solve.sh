rm junk.txt
