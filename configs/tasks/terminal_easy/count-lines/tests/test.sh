# 4, as wc prints it with or without the name.
[[ "$(cat count.txt)" =~ ^\ *4(\ list.txt)?$ ]] || exit 1
