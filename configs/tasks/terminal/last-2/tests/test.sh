# The last word in alphabetical order.
[ "$(cat out.txt)" = green ] || exit 1
