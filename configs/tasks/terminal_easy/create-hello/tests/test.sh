# The file holds the word and nothing else.
[ "$(cat hello.txt)" = hello ] || exit 1
