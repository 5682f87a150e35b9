# The right file is gone, the others are as they were.
[ ! -e fig.txt ] && [ "$(cat apple.txt)" = red ] && [ "$(cat pear.txt)" = blue ] || exit 1
