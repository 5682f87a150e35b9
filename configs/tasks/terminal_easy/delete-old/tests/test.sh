# That file is gone, the other one is not.
[ ! -e old.log ] && [ -e keep.txt ] || exit 1
