# The file holds the word and nothing else.
[ "$(cat banana.txt)" = banana ] || exit 1
