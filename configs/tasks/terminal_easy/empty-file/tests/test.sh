# It exists and is empty.
[ -f empty.txt ] && [ ! -s empty.txt ] || exit 1
