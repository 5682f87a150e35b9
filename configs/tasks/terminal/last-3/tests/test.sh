# The last word in alphabetical order.
[ "$(cat new.txt)" = red ] || exit 1
