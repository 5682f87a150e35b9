# b.txt keeps its first line and has the word as its second.
[ "$(cat b.txt)" = "$(printf 'blue\nred')" ] || exit 1
