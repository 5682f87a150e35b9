# The file holds the word and nothing else.
[ "$(cat seven.txt)" = seven ] || exit 1
