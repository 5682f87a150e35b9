# The file holds the word and nothing else.
[ "$(cat out.txt)" = hello ] || exit 1
