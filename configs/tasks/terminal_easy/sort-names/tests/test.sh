# The three names in alphabetical order.
[ "$(cat sorted.txt)" = "$(printf 'ann\nbob\ntom')" ] || exit 1
