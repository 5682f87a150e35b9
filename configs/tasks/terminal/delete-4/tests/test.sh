# The right file is gone, the others are as they were.
[ ! -e plum.txt ] && [ "$(cat apple.txt)" = red ] && [ "$(cat pear.txt)" = blue ] || exit 1
