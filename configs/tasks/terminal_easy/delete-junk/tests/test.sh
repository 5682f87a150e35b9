# That file is gone, the other one is not.
[ ! -e junk.txt ] && [ -e keep.txt ] || exit 1
