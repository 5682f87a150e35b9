# Two looks are needed: which file, and which word.
[ "$(cat out.txt)" = red ] && [ -e fig.txt ] || exit 1
