{{/* The pod template of a Ray node: call with (dict "root" . "role" ROLE "group" VALUES). */}}
{{- define "pilotfish.pod" -}}
{{- $root := .root -}}
{{- $isHead := eq .role "head" -}}
metadata:
  labels:
    {{- /* No version: a new version of the chart alone must not replace the pods. */}}
    {{- include "pilotfish.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- with $root.Values.pods.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $root.Values.pods.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "pilotfish.serviceAccountName" $root }}
  # Only Ray's autoscaler, a container of the head, calls the API server.
  automountServiceAccountToken: {{ and $isHead $root.Values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "pilotfish.graceSeconds" $root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $root.Values.pods.userId }}
    runAsGroup: {{ $root.Values.pods.userId }}
    fsGroup: {{ $root.Values.pods.userId }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.topologySpread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $.group.topologyKey }}
      whenUnsatisfiable: {{ . }}
      labelSelector:
        matchLabels:
          {{- include "pilotfish.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $.role }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "pilotfish.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "pilotfish.containerSecurity" $root | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: http, containerPort: 8000}
        {{- if eq .role "ingress" }}
        - {name: grpc, containerPort: {{ include "pilotfish.grpcPort" $root }}}
        {{- end }}
      resources:
        {{- range tuple "requests" "limits" }}
        {{ . }}:
          cpu: {{ $.group.cpu | quote }}
          memory: {{ $.group.memory }}
          {{- if $.group.gpus }}
          {{ $.group.gpuResource }}: {{ $.group.gpus | quote }}
          {{- end }}
        {{- end }}
      env:
        {{- include "pilotfish.env" $root | nindent 8 }}
        {{- with concat $root.Values.pods.env .group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $root.Values.pods.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- include "pilotfish.probes" . | nindent 6 }}
      {{- if not $isHead }}
      lifecycle:
        preStop:
          # Requests end before the processes do: endpoints drop the pod while its replicas go on.
          exec:
            command: [sleep, {{ include "pilotfish.drainSeconds" $root | quote }}]
      {{- end }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: temporary, mountPath: /tmp}
        - {name: cache, mountPath: /home/pilotfish/.cache}
        - {name: models, mountPath: /models}
        {{- if and (eq .role "ingress") $root.Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: {{ include "pilotfish.apiKeysDirectory" $root }}, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: {{ include "pilotfish.tlsDirectory" $root }}, readOnly: true}
        {{- end }}
        {{- with $root.Values.pods.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ .group.sharedMemory }}
    - name: temporary
      emptyDir: {}
    - name: cache
      emptyDir: {}
    - name: models
      {{- if $root.Values.models.cache.enabled }}
      persistentVolumeClaim:
        claimName: {{ $root.Values.models.cache.existingClaim | default (printf "%s-models" (include "pilotfish.fullname" $root)) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if eq .role "ingress" }}
    {{- with $root.Values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- /* Serve has an HTTP proxy in every pod. */}}
    {{- with $root.Values.tls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with $root.Values.pods.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "pilotfish.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pilotfish.env" -}}
- {name: HOME, value: /home/pilotfish}
- {name: PILOTFISH_CACHE_DIR, value: /models/pilotfish}
{{- /* All pods may write to the volume of the models, so compiled code has a volume of the pod's own. */}}
- {name: PILOTFISH_CODE_DIR, value: /home/pilotfish/.cache/pilotfish}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/pilotfish/.cache/inductor}
- {name: TRITON_CACHE_DIR, value: /home/pilotfish/.cache/triton}
- {name: CUDA_CACHE_PATH, value: /home/pilotfish/.cache/nv}
- {name: HF_HOME, value: /models/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "deploy.ray.proxy:middlewares"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "pilotfish.raySecret" . }}, key: auth_token}
- name: PILOTFISH_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "pilotfish.clusterSecret" . }}, key: {{ .Values.secrets.cluster.key }}}
{{- with .Values.models.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.models.huggingFace.key }}}
{{- end }}
{{- end -}}

{{/* Ray's node answers on port 52365, the ingress on 8000. */}}
{{- define "pilotfish.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $node := dict "path" "/api/local_raylet_healthz" "port" 52365 -}}
{{- $tls := (include "pilotfish.server" .root | fromYaml).tls | default dict -}}
{{- $api := dict "path" "/ready" "port" "http" "scheme" (ternary "HTTPS" "HTTP" (hasKey $tls "certificate")) -}}
{{- $ready := dict "httpGet" (ternary $api $node (eq .role "ingress")) -}}
{{- if and (eq .role "ingress") (hasKey $tls "client_ca") -}}
{{- /* Probes present no certificate. */}}
{{- $ready = dict "tcpSocket" (dict "port" "http") -}}
{{- end -}}
livenessProbe:
  httpGet: {{ toJson $node }}
  initialDelaySeconds: 30
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.failureThreshold }}
readinessProbe:
  {{- toYaml $ready | nindent 2 }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: 2
{{- end -}}
