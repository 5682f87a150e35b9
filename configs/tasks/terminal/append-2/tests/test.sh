# b.txt keeps its first line and has the word as its second.
[ "$(cat b.txt)" = "$(printf 'green\nblue')" ] || exit 1
