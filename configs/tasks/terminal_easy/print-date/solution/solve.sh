date +%Y > year.txt
