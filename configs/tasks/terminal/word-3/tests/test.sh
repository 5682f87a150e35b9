# Two looks are needed: which file, and which word.
[ "$(cat new.txt)" = gold ] && [ -e plum.txt ] || exit 1
