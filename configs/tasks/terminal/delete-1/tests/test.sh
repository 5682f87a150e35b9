# The right file is gone, the others are as they were.
[ ! -e pear.txt ] && [ "$(cat apple.txt)" = red ] && [ "$(cat plum.txt)" = blue ] || exit 1
