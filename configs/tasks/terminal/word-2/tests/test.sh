# Two looks are needed: which file, and which word.
[ "$(cat out.txt)" = green ] && [ -e pear.txt ] || exit 1
