# Both names are in the list.
grep -q one.txt files.txt && grep -q two.txt files.txt || exit 1
