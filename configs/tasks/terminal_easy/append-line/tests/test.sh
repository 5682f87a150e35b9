# The first line stays, the second is the word.
[ "$(cat log.txt)" = "$(printf 'start\nend')" ] || exit 1
