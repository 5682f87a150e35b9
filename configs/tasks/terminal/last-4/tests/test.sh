# The last word in alphabetical order.
[ "$(cat out.txt)" = red ] || exit 1
