# The right file is gone, the others are as they were.
[ ! -e apple.txt ] && [ "$(cat pear.txt)" = red ] && [ "$(cat plum.txt)" = blue ] || exit 1
